"""What happened to requests on several workers, read over the side channel and put on one clock."""
