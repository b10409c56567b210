"""A small HTTP proxy on the loopback interface, which knows one host and writes down what it is asked for."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Proxy(socketserver.ThreadingTCPServer):
    """Answers CONNECT for ``host``, which nobody else resolves, with a connection to this machine."""

    daemon_threads = True

    def __init__(self, host: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.host, self.asked = host, []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        place = self.rfile.readline().split()[1].decode()
        while self.rfile.readline().strip():
            pass
        self.server.asked.append(place)
        host, _, port = place.rpartition(":")
        if host != self.server.host:
            self.wfile.write(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
            return
        with socket.create_connection(("127.0.0.1", int(port))) as far:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            threading.Thread(target=_pump, args=(far, self.connection), daemon=True).start()
            _pump(self.connection, far)


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Carry bytes one way until either end closes."""
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return  # the other direction has ended first


@contextmanager
def proxy_to(host: str) -> Iterator[Proxy]:
    """Run a proxy that knows this host."""
    with Proxy(host) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield proxy
        proxy.shutdown()
