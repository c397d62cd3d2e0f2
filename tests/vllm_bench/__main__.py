import sys

from tests.vllm_bench.seeds import main

sys.exit(main())
