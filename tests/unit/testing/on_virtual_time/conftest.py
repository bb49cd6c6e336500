"""This folder runs on virtual time, fixtures included."""

from kici.testing.virtual_time import pytest_asyncio_loop_factories as pytest_asyncio_loop_factories
