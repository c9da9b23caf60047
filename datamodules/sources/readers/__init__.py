"""How sources read: single files, tables by split, columns of classes, folders of classes."""
