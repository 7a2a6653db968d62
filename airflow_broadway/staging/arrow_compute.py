"""Arrow's functions; most are generated at import, which takes a while, and unknown to type
checkers.
"""

from __future__ import annotations

from typing import Any

import pyarrow.compute

compute: Any = pyarrow.compute
