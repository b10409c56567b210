"""Where whole runs are trained: in this process, in processes beside each other, or on the nodes of a cluster."""
