//! Page keys: BLAKE3 over tagged, length-framed fields, chained from the namespace. Equal across processes,
//! restarts and `PYTHONHASHSEED`; computed where a page leaves the tree (spill, remote, events), never at insert.

use crate::{GroupId, Token};
use std::fmt;

macro_rules! digest {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub [u8; 32]);

        impl $name {
            /// Lower-case hexadecimal, 64 characters.
            pub fn to_hex(&self) -> String {
                self.0.iter().map(|byte| format!("{byte:02x}")).collect()
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({}..)", stringify!($name), &self.to_hex()[..12])
            }
        }
    };
}

digest!(
    /// The digest of a tenant salt and an adapter: pages of two namespaces never match.
    Namespace
);
digest!(
    /// What pages must share to be interchangeable: weights, dtype, record shape, rope, page size, shard.
    Fingerprint
);
digest!(
    /// One page's place in one token sequence: its own tokens and everything before them.
    PageKey
);

/// A hasher in which no two different lists of fields collide: each field carries its tag and its length.
pub struct KeyHasher(blake3::Hasher);

impl KeyHasher {
    /// Starts a digest of the given kind; two kinds never collide.
    pub fn new(kind: &str) -> Self {
        let mut hasher = KeyHasher(blake3::Hasher::new());
        hasher.field("strata", kind.as_bytes());
        hasher
    }

    /// Adds one field.
    pub fn field(&mut self, tag: &str, bytes: &[u8]) -> &mut Self {
        for part in [tag.as_bytes(), bytes] {
            self.0.update(&(part.len() as u64).to_le_bytes());
            self.0.update(part);
        }
        self
    }

    /// The digest of everything added so far.
    pub fn finish(&self) -> [u8; 32] {
        *self.0.finalize().as_bytes()
    }
}

impl Namespace {
    /// The namespace of a tenant's salt and an adapter's name; both may be empty.
    pub fn new(salt: &str, adapter: &str) -> Namespace {
        let mut hasher = KeyHasher::new("namespace");
        hasher.field("salt", salt.as_bytes()).field("adapter", adapter.as_bytes());
        Namespace(hasher.finish())
    }

    /// The key that stands before a namespace's first page.
    pub fn root_key(&self, group: GroupId) -> PageKey {
        let mut hasher = KeyHasher::new("root");
        hasher.field("namespace", &self.0).field("group", &group.0.to_le_bytes());
        PageKey(hasher.finish())
    }
}

impl PageKey {
    /// The key of the page with these tokens that follows this one.
    pub fn child(&self, tokens: &[Token]) -> PageKey {
        let mut hasher = KeyHasher::new("page");
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        hasher.field("parent", &self.0).field("tokens", &bytes);
        PageKey(hasher.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_vectors_are_stable() {
        // Computed once by an independent BLAKE3 from the framing above: a change orphans every disk root.
        let root = Namespace::new("", "").root_key(GroupId(0));
        let page = root.child(&[1, 2, 3, 4]);
        assert_eq!(root.to_hex(), "2baa23d6e2e40373ec04150da58f7a95db83adcb28e56babc7023636c5bf0547");
        assert_eq!(page.to_hex(), "24aaa1b335b03713394c93d70f4efb62c5b9b4be643fede8df523ac90c1fb1f1");
        assert_ne!(page, root.child(&[1, 2, 3]).child(&[4]));
    }

    #[test]
    fn framing_separates_fields() {
        let mut one = KeyHasher::new("t");
        one.field("a", b"bc").field("d", b"");
        let mut two = KeyHasher::new("t");
        two.field("a", b"b").field("cd", b"");
        assert_ne!(one.finish(), two.finish());
        assert_ne!(Namespace::new("a", "b"), Namespace::new("ab", ""));
        assert_ne!(Namespace::new("", "").root_key(GroupId(0)), Namespace::new("", "").root_key(GroupId(1)));
    }
}
