"""Tells each datagram that comes in at a port, and from where, until it is ended."""

import socket
import sys

listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
listener.bind(("0.0.0.0", int(sys.argv[1])))
sys.stdout.write("listening\n")
sys.stdout.flush()
while True:
    data, sender = listener.recvfrom(1500)
    sys.stdout.write(f"{data.decode().strip()} from {sender[0]}\n")
    sys.stdout.flush()
