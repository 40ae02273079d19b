"""The worker as a process: started as `up` starts it, woken over the filesystem broker, stopped by SIGTERM."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
