"""The paper's tables: measure each section, then draw the pages, targets and README figures."""
