"""The range file, user-defined ranges, and the text log of minima and maxima."""
