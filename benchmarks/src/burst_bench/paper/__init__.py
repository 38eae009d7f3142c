"""The paper's tables: what measures each section, and the pages, targets and README figures drawn from it."""
