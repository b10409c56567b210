"""A federation of sites as a Flower app: a ServerApp for the run, and a ClientApp at each site.

Only this folder imports ``flwr``, and only its documented names. Flower starts a process for each message.
"""
