//! After a restart: the records that a scan of the disk found become pages of the tree again, parents first.

use crate::controller::CacheController;
use crate::ControlError;
use std::collections::HashMap;
use strata_types::{PageId, PageKey, PageRecord, TierId, Token};

/// Rebuilds paths from records. Each record's key and parent are recomputed, so a record that lies about either
/// is left out, and with it everything that hangs below it.
pub(crate) fn recover(
    control: &mut CacheController,
    found: Vec<(PageId, PageRecord)>,
) -> Result<u32, ControlError> {
    let group = control.config.group;
    let page_size = control.config.page_size as usize;
    let mut children: HashMap<PageKey, Vec<usize>> = HashMap::new();
    let mut roots: Vec<usize> = Vec::new();
    for (index, (_, record)) in found.iter().enumerate() {
        if record.tokens.len() != page_size || record.parent.child(&record.tokens) != record.key {
            continue;
        }
        if record.parent == record.namespace.root_key(group) {
            roots.push(index);
        } else {
            children.entry(record.parent).or_default().push(index);
        }
    }
    let mut recovered = 0;
    for root in roots {
        // Depth first along chains: each step inserts one straight run and leaves its branches for later.
        let mut pending: Vec<(usize, Vec<Token>)> = vec![(root, Vec::new())];
        while let Some((start, mut tokens)) = pending.pop() {
            let first_page = (tokens.len() / page_size) as u32;
            let mut slots = Vec::new();
            let mut next = Some(start);
            while let Some(index) = next {
                let (slot, record) = &found[index];
                tokens.extend_from_slice(&record.tokens);
                slots.push(*slot);
                let mut below = children.remove(&record.key).unwrap_or_default().into_iter();
                next = below.next();
                pending.extend(below.map(|branch| (branch, tokens.clone())));
            }
            recovered += adopt(control, &found[start].1, &tokens, first_page, &slots)?;
        }
    }
    Ok(recovered)
}

fn adopt(
    control: &mut CacheController,
    record: &PageRecord,
    tokens: &[Token],
    first_page: u32,
    slots: &[PageId],
) -> Result<u32, ControlError> {
    let group = control.config.group;
    let inserted = control.tree.insert(&record.namespace, group, tokens, TierId::DISK, slots, first_page)?;
    let mut adopted = 0;
    for slot in slots {
        if !inserted.duplicates.iter().any(|(_, duplicate)| duplicate == slot) {
            control.pools[TierId::DISK.index()].adopt(*slot)?;
            adopted += 1;
        }
    }
    Ok(adopted)
}
