//! Cutting, completing, and lying guests (COM-16 to COM-18).
