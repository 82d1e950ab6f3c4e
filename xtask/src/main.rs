//! Thin verbs over the other crates.
fn main() {}
