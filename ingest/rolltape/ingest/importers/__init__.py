"""Importers: rollouts that others recorded become events, with nothing added that the file does not say.

Event ids derive from the file's digest and the row, so importing twice adds nothing and an import that was killed
completes when it is run again. Token ids and log-probs are taken as they are or left out: none is ever made up.
"""

from rolltape.ingest.importers.formats import FORMATS, ImportFormat
from rolltape.ingest.importers.run import ImportReport, import_file

__all__ = ["FORMATS", "ImportFormat", "ImportReport", "import_file"]
