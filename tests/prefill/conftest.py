"""What these tests share with those of the transfer thread."""

from tests.transfer.conftest import pair as pair
