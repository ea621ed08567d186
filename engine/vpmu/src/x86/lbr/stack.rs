//! The records, the most recent first.

/// Most records that a stack can have.
pub const MAX_DEPTH: u8 = 32;

/// The field of a record that a register holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field {
    /// The address of the branch.
    From,
    /// The address of its target.
    To,
    /// What else is known of the branch. Intel's only.
    Info,
}

/// One record as its registers hold it. A record of zeros is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(super) struct Entry {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) info: u64,
}

/// The records of one PMU. Record 0 is the most recent one; those from the depth on do not exist and are zero.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Stack {
    depth: u8,
    entries: [Entry; MAX_DEPTH as usize],
}

impl Stack {
    /// Returns `depth` records that are none, at most [`MAX_DEPTH`].
    pub(super) fn new(depth: u8) -> Self {
        Self {
            depth: depth.min(MAX_DEPTH),
            entries: [Entry::default(); MAX_DEPTH as usize],
        }
    }

    /// Returns how many records there are.
    pub const fn depth(&self) -> u8 {
        self.depth
    }

    /// Returns the addresses of record `n`, of the branch and of its target, as the registers hold them; `None`: there
    /// is no such record.
    pub fn record(&self, n: u8) -> Option<(u64, u64)> {
        self.entry(n).map(|entry| (entry.from, entry.to))
    }

    pub(super) fn clear(&mut self) {
        *self = Self::new(self.depth);
    }

    pub(super) fn push(&mut self, entry: Entry) {
        // Not `rotate_right`, which panics where there are no records.
        let mut next = entry;
        for record in self.live_mut() {
            next = core::mem::replace(record, next);
        }
    }

    /// Takes the most recent record away; the others move up.
    pub(super) fn pop(&mut self) {
        let mut next = Entry::default();
        for record in self.live_mut().iter_mut().rev() {
            next = core::mem::replace(record, next);
        }
    }

    /// Returns the record as a PEBS record has it: FROM, TO and INFO. One that does not exist is zeros.
    pub(in crate::x86) fn words(&self, n: u8) -> [u64; 3] {
        self.entry(n)
            .map_or([0; 3], |entry| [entry.from, entry.to, entry.info])
    }

    pub(super) fn entry(&self, n: u8) -> Option<&Entry> {
        self.entries.get(usize::from(n)).filter(|_| n < self.depth)
    }

    pub(super) fn field(&self, field: Field, n: u8) -> Option<u64> {
        self.entry(n).map(|entry| match field {
            Field::From => entry.from,
            Field::To => entry.to,
            Field::Info => entry.info,
        })
    }

    /// `None`: there is no such record.
    pub(super) fn set_field(&mut self, field: Field, n: u8, value: u64) -> Option<()> {
        // Records beyond the depth are not kept: a deeper stack begins with records that are none.
        let entry = self.live_mut().get_mut(usize::from(n))?;
        match field {
            Field::From => entry.from = value,
            Field::To => entry.to = value,
            Field::Info => entry.info = value,
        }
        Some(())
    }

    /// Whether a saved stack is one that `kept` lets registers hold, with nothing where no record is.
    pub(super) fn is_sound(&self, kept: impl Fn(Field, u64) -> u64) -> bool {
        let fits = |entry: &Entry| {
            kept(Field::From, entry.from) == entry.from
                && kept(Field::To, entry.to) == entry.to
                && kept(Field::Info, entry.info) == entry.info
        };
        let (mut live, mut beyond) = (true, true);
        for (n, entry) in (0..).zip(&self.entries) {
            if n < self.depth {
                live &= fits(entry);
            } else {
                beyond &= *entry == Entry::default();
            }
        }
        self.depth <= MAX_DEPTH && live && beyond
    }

    fn live_mut(&mut self) -> &mut [Entry] {
        let depth = usize::from(self.depth.min(MAX_DEPTH));
        self.entries.get_mut(..depth).unwrap_or_default()
    }
}
