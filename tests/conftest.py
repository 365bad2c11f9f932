"""No test reaches a network or the user's own hub cache: both are switched off before anything reads them."""

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="smoe-hub-")
