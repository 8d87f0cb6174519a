//! vgpuctl
fn main() {}
