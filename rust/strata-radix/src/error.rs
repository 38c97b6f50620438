//! What a caller can do wrong. A call that fails has changed no page; only `Full`, which takes four billion nodes or
//! pages, may come half way.

use strata_types::{GroupId, RequestId, TierId};
use thiserror::Error;

/// Why the tree refused a call.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum RadixError {
    /// The tree was configured without this group or tier.
    #[error("the tree has {groups} groups and {tiers} tiers, but the call names group {group}, tier {}", tier.0)]
    UnknownPlace {
        /// The group asked for.
        group: GroupId,
        /// The tier asked for.
        tier: TierId,
        /// The groups that there are.
        groups: u16,
        /// The tiers that there are.
        tiers: u8,
    },
    /// The configuration describes no tree.
    #[error("a tree needs {field} of at least 1, got 0")]
    Configuration {
        /// The field that was zero.
        field: &'static str,
    },
    /// Fewer tokens than the slots need.
    #[error("pages {from_page}..{end_page} of {page_size} tokens were offered with only {tokens} tokens")]
    TooFewTokens {
        /// The first page offered.
        from_page: u32,
        /// The page after the last one offered.
        end_page: u64,
        /// Tokens of a page.
        page_size: u32,
        /// The tokens given.
        tokens: usize,
    },
    /// The pages before the offered ones are in no tier.
    #[error(
        "pages from {from_page} on were offered, but some tier holds only the first {held} pages before them"
    )]
    Gap {
        /// The first page offered.
        from_page: u32,
        /// The pages that some tier holds.
        held: u32,
    },
    /// The handle's node is gone: its pages were forgotten, or merged into another node.
    #[error("the handle to the first {pages} pages is stale: match the tokens again")]
    Stale {
        /// The pages that the handle spans.
        pages: u32,
    },
    /// The request has no watched path.
    #[error("request {request} watches no path: watch one first")]
    Unwatched {
        /// The request.
        request: RequestId,
    },
    /// A node id or a page number no longer fits 32 bits.
    #[error("the tree is full: {what} would pass 32 bits")]
    Full {
        /// What would overflow.
        what: &'static str,
    },
}
