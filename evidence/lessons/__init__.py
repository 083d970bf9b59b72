"""The recorded predictions, by the lesson that reads them."""
