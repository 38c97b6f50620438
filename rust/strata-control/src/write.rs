//! When a page is copied to the tier below.

/// Decides for a page that the upper tier holds and the lower one does not.
pub trait WritePolicy: Send {
    /// The name that flags and metrics use.
    fn name(&self) -> &'static str;

    /// Whether a page with this many accesses, its creation included, is copied now.
    fn copies(&self, accesses: u32) -> bool;

    /// Whether a page is copied when it is about to be evicted, so that eviction loses nothing.
    fn saves_victims(&self) -> bool {
        false
    }
}

/// A page when it is about to be evicted, and not before.
#[derive(Debug, Default)]
pub struct Back;

impl WritePolicy for Back {
    fn name(&self) -> &'static str {
        "back"
    }

    fn copies(&self, _accesses: u32) -> bool {
        false
    }

    fn saves_victims(&self) -> bool {
        true
    }
}

/// Every new page at once.
#[derive(Debug, Default)]
pub struct Through;

impl WritePolicy for Through {
    fn name(&self) -> &'static str {
        "through"
    }

    fn copies(&self, _accesses: u32) -> bool {
        true
    }
}

/// A page at its n-th access, creation being the first; with n = 1 the same as `Through`.
#[derive(Debug)]
pub struct Selective {
    /// The access at which a page is copied.
    pub accesses: u32,
}

impl WritePolicy for Selective {
    fn name(&self) -> &'static str {
        "selective"
    }

    fn copies(&self, accesses: u32) -> bool {
        accesses >= self.accesses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selective_counts_creation_as_the_first_access() {
        let twice = Selective { accesses: 2 };
        assert!(!twice.copies(1) && twice.copies(2) && twice.copies(3));
        assert!(Selective { accesses: 1 }.copies(1) && Through.copies(1));
        assert!(!Back.copies(9) && Back.saves_victims() && !Through.saves_victims());
    }
}
