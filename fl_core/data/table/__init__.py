"""Tables: opened by pandas, each column described once, and then refused or prepared."""
