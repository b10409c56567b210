"""The papers' figures and tables made anew: recipes, the rows they gave, and pictures beside published values."""
