"""The store where a group's members meet holds its port from the moment its address is known."""

import socket

import pytest

from rlinf_vl.transport.rendezvous import find, listen


def test_nobody_else_gets_the_port():
    store, address = listen("127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(address)
    find(address).set("who", "another member")
    assert store.get("who") == b"another member"


def test_every_store_has_a_port_of_its_own():
    (_first, one), (_second, other) = listen("127.0.0.1"), listen("127.0.0.1")
    assert one[1] != other[1]
