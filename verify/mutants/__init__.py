"""Named bugs, planted one at a time in the shipped source, in memory: the judge is tested by what it has to find.

`MUTANTS` has every `Mutant` by name. `Graft(mutant.edits)` is the project with that one bug in it: its
``load("flash_cuda.step3_flash_v2")`` stands in the place of ``import_module``, and changes nothing else. `trial` runs a
mutant on a case, `campaign` all of them.
"""

from verify.mutants.catalogue import MUTANTS
from verify.mutants.graft import DoesNotApply, Graft, Reached
from verify.mutants.mutant import AREAS, Edit, Mutant

__all__ = ["AREAS", "MUTANTS", "DoesNotApply", "Edit", "Graft", "Mutant", "Reached"]
