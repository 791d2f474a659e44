"""Beginnings of Python files, written for this benchmark."""

PROMPTS = (
    '''import csv
from pathlib import Path


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a file with a header, as dictionaries."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
''',
    """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
""",
    """import unittest


class TestTemperature(unittest.TestCase):
    def test_freezing(self):
        self.assertEqual(to_fahrenheit(0), 32)

    def test_boiling(self):
        self.assertEqual(to_fahrenheit(100), 212)

    def test_body(self):
""",
    '''def merge(left, right):
    """Merge two sorted lists into one."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
''',
    """import argparse
import sys


def main(argv=None):
    parser = argparse.ArgumentParser(description="Count words in files.")
    parser.add_argument("files", nargs="*", help="files to read")
    parser.add_argument("-n", "--number", type=int, default=10)
    args = parser.parse_args(argv)
""",
    '''class Account:
    """A bank account with a history."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
''',
    """def parse_query(query):
    result = {}
    for part in query.split("&"):
        key, _, value = part.partition("=")
        if not key:
            continue
""",
    '''import threading
import time


class Timer(threading.Thread):
    """Call a function after a number of seconds."""

    def __init__(self, interval, function, args=None, kwargs=None):
        threading.Thread.__init__(self)
        self.interval = interval
        self.function = function
''',
    """DAYS = {
    "monday": 1,
    "tuesday": 2,
    "wednesday": 3,
    "thursday": 4,
    "friday":""",
    '''def gcd(a, b):
    """The greatest common divisor of a and b."""
    while b:
        a, b = b, a % b
    return a


def lcm(a, b):
    """The least common multiple of a and b."""
''',
    """class Shape:
    def area(self):
        raise NotImplementedError


class Rectangle(Shape):
    def __init__(self, width, height):
        self.width = width
        self.height = height

    def area(self):
        return self.width * self.height


class Circle(Shape):
""",
    """import logging

logger = logging.getLogger(__name__)


def retry(function, attempts=3):
    for attempt in range(attempts):
        try:
            return function()
        except OSError as error:
            logger.warning(""",
    '''def walk(node, visit):
    """Visit a tree in order."""
    if node is None:
        return
    walk(node.left, visit)
''',
    """    def test_missing_key(self):
        cache = Cache(capacity=2)
        self.assertIsNone(cache.get("a"))

    def test_oldest_is_dropped(self):
        cache = Cache(capacity=2)
        cache.put("a", 1)
        cache.put("b", 2)
        cache.put("c", 3)
""",
    """from dataclasses import dataclass


@dataclass
class Point:
    x: float
    y: float

    def __add__(self, other):
        return Point(self.x + other.x, self.y + other.y)

    def __sub__(self, other):
""",
    '''import os
import shutil
import tempfile


def copy_tree(source, target):
    """Copy a folder with everything in it."""
    if not os.path.isdir(source):
        raise ValueError("%s is not a folder" % source)
    for name in os.listdir(source):
        path = os.path.join(source, name)
''',
)
