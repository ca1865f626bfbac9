//! The binary `pagetide`.

fn main() {}
