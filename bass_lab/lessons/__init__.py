"""What only the lessons use: figures, widgets and small demonstrations, one module per lesson."""
