"""Reports of measured rates: tables and a hardware description."""
