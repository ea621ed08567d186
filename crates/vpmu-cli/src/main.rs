//! The `vpmu` command.
fn main() {}
