"""Choose a schedule by predicted time: hardware rates, a traffic model, a timing model."""
