"""Steps of a run: their work, planning ahead, execution, measurement and non-finite guard."""
