"""What this machine and this configuration will do, before a node is started or beside one that serves."""
