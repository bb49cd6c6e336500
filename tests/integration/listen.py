"""Listens on a port, accepts and closes: something to be reached, or not."""

import socket
import sys

with socket.socket() as listener:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("0.0.0.0", int(sys.argv[1])))
    listener.listen(100)
    while True:
        connection, _ = listener.accept()
        connection.close()
