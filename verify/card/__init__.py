"""Everything that is known of one kernel after it was judged, and the forms in which it is shown."""
