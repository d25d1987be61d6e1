"""Which CUDA segment holds a tensor, found without a GPU: the driver's answers are made up."""

import random

import pytest
import torch

from weightsync.transport.ipc import IpcExporter

GPU = torch.device("cuda", 0)


class Driver:
    """Segments of `size` bytes at given addresses; counts what it is asked."""

    def __init__(self, bases, size):
        self.bases, self.size, self.num_asked = bases, size, 0

    def address_range(self, address):
        self.num_asked += 1
        return next((base, self.size) for base in self.bases if base <= address < base + self.size)

    def buffer_id(self, base):
        return self.bases.index(base)


class At:
    """A tensor as far as `locate` looks."""

    def __init__(self, address, device=GPU):
        self.address, self.device = address, device

    def data_ptr(self):
        return self.address


@pytest.fixture
def exporter():
    made = IpcExporter.__new__(IpcExporter)  # past __init__, which needs a GPU
    made._device, made._segments, made._bases = GPU, [], []
    made._driver = Driver([4096 * index for index in (9, 1, 4, 2, 7)], 4096)
    return made


@pytest.mark.parametrize("seed", range(5))
def test_a_tensor_lies_in_its_segment_whatever_the_order_and_the_driver_is_asked_once_per_segment(exporter, seed):
    driver = exporter._driver
    addresses = [base + offset for base in driver.bases for offset in (0, 512, 4095)]
    random.Random(seed).shuffle(addresses)
    for address in addresses:
        place = exporter.locate(At(address))
        assert place.allocation.base + place.offset == address
        assert 0 <= place.offset < 4096
        assert place.allocation.buffer_id == driver.bases.index(place.allocation.base)
    assert driver.num_asked == len(driver.bases)
    assert exporter._bases == sorted(driver.bases)


def test_a_tensor_of_another_device_lies_nowhere(exporter):
    assert exporter.locate(At(4096, torch.device("cpu"))) is None
    assert exporter._driver.num_asked == 0
