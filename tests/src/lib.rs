//! Stories told from the guest's side.
