"""A Flower app that sends empty messages to all nodes, and prints how long the replies take."""

import time

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

TIMES = 4
POLL = 0.3
client = ClientApp()
server = ServerApp()


@client.query()
def reply(message, context):
    """Reply with nothing."""
    return Message(RecordDict(), reply_to=message)


@server.main()
def main(grid, context):
    """Ask all nodes at once, some times."""
    for _ in range(TIMES):
        began = time.monotonic()
        nodes = grid.get_node_ids()
        messages = [Message(RecordDict(), node, "query") for node in nodes]
        ids, replies = grid.push_messages(messages), 0
        while replies < len(messages):
            time.sleep(POLL)
            replies += len(list(grid.pull_messages(ids)))
        print(f"empty messages: {time.monotonic() - began:.1f} s", flush=True)
