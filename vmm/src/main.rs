//! wonton
fn main() {}
