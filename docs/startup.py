"""What every page's kernel runs first: no progress bars, and warnings without a path of the machine that built the site."""

import sys
import warnings

import tqdm


def _without_bar(init):
    def silent(self, *args, **kwargs):
        init(self, *args, **{**kwargs, "disable": True})

    return silent


def _show(message, category, *_, **__):
    print(f"{category.__name__}: {message}", file=sys.stderr)


tqdm.tqdm.__init__ = _without_bar(tqdm.tqdm.__init__)
warnings.filterwarnings("ignore", "IProgress not found")
warnings.showwarning = _show
