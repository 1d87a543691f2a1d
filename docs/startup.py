"""What every page's kernel runs first: no progress bars; warnings and errors without paths of this machine."""

import sys
import warnings

import tqdm
from IPython import get_ipython


def _without_bar(init):
    def silent(self, *args, **kwargs):
        init(self, *args, **{**kwargs, "disable": True})

    return silent


def _show(message, category, *_, **__):
    print(f"{category.__name__}: {message}", file=sys.stderr)


tqdm.tqdm.__init__ = _without_bar(tqdm.tqdm.__init__)
warnings.filterwarnings("ignore", "IProgress not found")
warnings.showwarning = _show
get_ipython().run_line_magic("xmode", "Minimal")  # of an error, the message alone
