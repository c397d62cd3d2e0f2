"""What two workers would do with each other, worked out from their configurations, with neither running.

``cache_file`` reads a configuration, ``tables`` makes the region tables of its ranks without touching
memory, ``report`` lines them up and plans a request, ``runner`` reads files and prints.
"""
