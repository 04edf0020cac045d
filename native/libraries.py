"""All native libraries, by name."""

from typing import Any

from native.engine_library import ENGINE
from native.move_library import RECIPE as MOVE
from native.ranks import RECIPE as RANKS
from native.recipe import Recipe
from native.ticker import RECIPE as TICKER

RECIPES: dict[str, Recipe[Any]] = {recipe.name: recipe for recipe in (MOVE, RANKS, TICKER, ENGINE)}
