// SPDX-License-Identifier: Apache-2.0
//! Which operation is to fail, and how.

/// Operations that a machine counts and can refuse.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Op {
    CreateTable,
    DestroyTable,
    Activate,
    Deactivate,
    Restrict,
    Grant,
    Invalidate,
    Inherited,
    Prepare,
    Copy,
}

impl Op {
    /// Those that can fail.
    pub const FALLIBLE: [Self; 9] = [
        Self::CreateTable,
        Self::Activate,
        Self::Deactivate,
        Self::Restrict,
        Self::Grant,
        Self::Invalidate,
        Self::Inherited,
        Self::Prepare,
        Self::Copy,
    ];
}

/// How an operation fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fails {
    /// With an error, having done nothing.
    Before,
    /// With an error, having done all or half of it where the contract allows that.
    After,
    /// A restriction is busy; others fail as with [`Self::Before`].
    Busy,
    /// The driver panics, having done nothing.
    Panics,
}

/// The plan: call number `from` of `op` fails, and `count` - 1 after it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Failing {
    pub op: Op,
    pub from: u32,
    pub count: u32,
    pub how: Fails,
}

impl Failing {
    pub fn nth(op: Op, from: u32) -> Self {
        Self {
            op,
            from,
            count: 1,
            how: Fails::Before,
        }
    }

    /// From the next call on, for ever.
    pub fn always(op: Op) -> Self {
        Self {
            count: u32::MAX,
            ..Self::nth(op, 0)
        }
    }

    pub fn fails(&self, op: Op, number: u32) -> Option<Fails> {
        let within = number >= self.from && number - self.from < self.count;
        (op == self.op && within).then_some(self.how)
    }
}
