//! `vgpud`.
fn main() {}
