//! Records of consecutive pages: the key chain is computed here, where pages leave the tree, and nowhere earlier.

use strata_types::{GroupId, Namespace, PageRecord, Token};

/// The records of pages `first_page..first_page + count` of a sequence; `tokens` starts at the sequence's start.
pub(crate) fn records(
    namespace: Namespace,
    group: GroupId,
    tokens: &[Token],
    page_size: u32,
    first_page: u32,
    count: usize,
) -> Vec<PageRecord> {
    let mut parent = namespace.root_key(group);
    let mut records = Vec::with_capacity(count);
    for (index, page) in tokens.chunks_exact(page_size as usize).take(first_page as usize + count).enumerate()
    {
        let key = parent.child(page);
        if index >= first_page as usize {
            records.push(PageRecord { namespace, parent, key, tokens: page.to_vec() });
        }
        parent = key;
    }
    records
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_of_the_chain_equals_the_whole_chain() {
        let tokens: Vec<Token> = (0..24).collect();
        let namespace = Namespace::new("tenant", "");
        let all = records(namespace, GroupId(0), &tokens, 4, 0, 6);
        assert_eq!(all.len(), 6);
        assert_eq!(records(namespace, GroupId(0), &tokens, 4, 2, 3), all[2..5]);
        assert_eq!(all[3].parent, all[2].key);
    }
}
