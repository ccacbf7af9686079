"""How far honest machines differ, and the tolerances that follow."""
