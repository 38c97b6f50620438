//! What somebody who knows the tree would send: no stack may overflow, no loop may stay, no bound may break.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::HashSet;
use strata_radix::{HiRadixTree, RadixError, TransientState, TreeConfig};
use strata_types::{GroupId, Namespace, PageId, RequestId, TierId, Token};

const GROUP: GroupId = GroupId(0);
const DEVICE: TierId = TierId::DEVICE;
const HOST: TierId = TierId::HOST;
const DISK: TierId = TierId::DISK;

fn tree(page_size: u32, ghost_pages: usize) -> HiRadixTree {
    HiRadixTree::new(TreeConfig { page_size, groups: 1, tiers: 3, ghost_pages }).unwrap()
}

fn name() -> Namespace {
    Namespace::new("tenant", "")
}

fn slots(range: std::ops::Range<u32>) -> Vec<PageId> {
    range.map(PageId).collect()
}

/// A chain of one-page nodes: every page has a sibling, so no two can be one node.
fn comb(tree: &mut HiRadixTree, depth: u32) -> Vec<Token> {
    let spine: Vec<Token> = vec![0; depth as usize];
    tree.insert(&name(), GROUP, &spine, DEVICE, &slots(0..depth), 0).unwrap();
    for page in (0..depth).rev() {
        let mut tooth = spine[..page as usize].to_vec();
        tooth.push(1);
        tree.insert(&name(), GROUP, &tooth, DEVICE, &[PageId(depth + page)], page).unwrap();
    }
    spine
}

#[test]
fn deep_chains_need_no_stack_and_go_leaf_first() {
    let mut tree = tree(1, 100);
    let depth = 4000;
    let spine = comb(&mut tree, depth);
    tree.check().unwrap();
    assert_eq!(tree.stats().nodes, 2 * depth as usize);
    let mut table = Vec::new();
    let pin = tree.match_into(&name(), GROUP, &spine, DEVICE, &mut table).unwrap();
    assert_eq!(table, slots(0..depth));
    assert_eq!(tree.evictable_pages(GROUP, DEVICE), depth as usize);
    let teeth = tree.clear(GROUP, DEVICE).unwrap();
    assert!(teeth.iter().all(|copy| copy.slot.0 >= depth), "a pinned page was evicted");
    tree.check().unwrap();
    tree.unpin(pin).unwrap();
    for page in (0..depth).rev() {
        let evicted = tree.evict(GROUP, DEVICE, 1).unwrap();
        assert_eq!(evicted.iter().map(|copy| copy.slot.0).collect::<Vec<_>>(), [page]);
    }
    tree.check().unwrap();
    assert!(tree.stats().ghost_pages <= 100);
}

#[test]
fn many_siblings_are_found_and_forgotten() {
    let mut tree = tree(2, 0);
    for child in 0..20_000u32 {
        let tokens = [7, 7, child, child];
        let from = u32::from(child > 0);
        let offered = if child == 0 { slots(0..2) } else { slots(child + 1..child + 2) };
        tree.insert(&name(), GROUP, &tokens, DEVICE, &offered, from).unwrap();
    }
    tree.check().unwrap();
    let found = tree.match_prefix(&name(), GROUP, &[7, 7, 12_345, 12_345]).unwrap();
    assert_eq!(found.prefix(DEVICE), [PageId(0), PageId(12_346)]);
    // The disk holds nothing but the shared page, so losing it everywhere takes all siblings at once.
    let gone = tree.remove(&name(), GROUP, &[7, 7], DEVICE, 0..1).unwrap();
    assert_eq!(gone.iter().map(|copy| copy.slot).collect::<HashSet<_>>().len(), 20_001);
    tree.check().unwrap();
    tree.evict(GROUP, DEVICE, 1).unwrap();
    while tree.stats().ghost_pages > 0 {
        tree.evict(GROUP, DEVICE, 0).unwrap();
    }
    assert_eq!((tree.stats().nodes, tree.stats().namespaces), (0, 0));
}

#[test]
fn long_common_prefixes_part_at_the_right_page() {
    let mut tree = tree(16, 0);
    let length = 64 * 1024;
    let base: Vec<Token> = (0..length).collect();
    tree.insert(&name(), GROUP, &base, DEVICE, &slots(0..length / 16), 0).unwrap();
    for (index, at) in [0, 1, 15, 16, 17, 8191, 32_768, 65_535].into_iter().enumerate() {
        let mut other = base.clone();
        other[at] += 1;
        let found = tree.match_prefix(&name(), GROUP, &other).unwrap();
        assert_eq!(found.pages as usize, at / 16);
        let first = length / 16 * (index as u32 + 1);
        let fresh = slots(first..first + length / 16 - found.pages);
        let done = tree.insert(&name(), GROUP, &other, DEVICE, &fresh, found.pages).unwrap();
        assert_eq!(done.handle.pages(), length / 16);
        assert_eq!(tree.page_path(done.handle).unwrap(), other);
        tree.check().unwrap();
    }
    assert_eq!(tree.match_prefix(&name(), GROUP, &base).unwrap().prefix(DEVICE), slots(0..length / 16));
    assert_eq!(tree.match_prefix(&Namespace::new("other", ""), GROUP, &base).unwrap().pages, 0);
}

#[test]
fn handles_survive_splits_and_are_found_out_when_stale() {
    let mut tree = tree(1, 0);
    let done = tree.insert(&name(), GROUP, &[1, 2, 3, 4], DEVICE, &slots(0..4), 0).unwrap();
    tree.insert(&name(), GROUP, &[1, 2, 9], DEVICE, &[PageId(9)], 2).unwrap();
    assert_eq!(tree.page_path(done.handle).unwrap(), [1, 2, 3, 4]);
    let pin = tree.pin(done.handle, DEVICE).unwrap();
    tree.insert(&name(), GROUP, &[1, 2, 3, 8], DEVICE, &[PageId(8)], 3).unwrap();
    tree.unpin(pin).unwrap();
    tree.check().unwrap();
    tree.clear(GROUP, DEVICE).unwrap();
    assert_eq!(tree.touch(done.handle), Err(RadixError::Stale { pages: 4 }));
    let again = tree.insert(&name(), GROUP, &[1, 2, 3, 4], DEVICE, &slots(0..4), 0).unwrap();
    assert_eq!(tree.pin(done.handle, DEVICE), Err(RadixError::Stale { pages: 4 }));
    tree.touch(again.handle).unwrap();
}

#[test]
fn the_last_copy_of_a_pinned_path_stays_and_its_ancestors_with_it() {
    let mut tree = tree(1, 0);
    // Pages 0 and 1 on the device only, pages 2 and 3 on the host only, pinned there.
    let path = [1, 2, 3, 4];
    tree.insert(&name(), GROUP, &path[..2], DEVICE, &slots(0..2), 0).unwrap();
    tree.insert(&name(), GROUP, &path, HOST, &slots(2..4), 2).unwrap();
    tree.insert(&name(), GROUP, &[1, 5], DEVICE, &[PageId(5)], 1).unwrap();
    let whole = tree.match_prefix(&name(), GROUP, &path).unwrap();
    assert_eq!(whole.fastest(), [(0..2, DEVICE), (2..4, HOST)]);
    let pin = tree.pin(whole.handle, HOST).unwrap();
    let evicted = tree.evict(GROUP, DEVICE, 10).unwrap();
    assert_eq!(evicted.iter().map(|copy| copy.slot.0).collect::<Vec<_>>(), [5]);
    tree.check().unwrap();
    tree.unpin(pin).unwrap();
    // Unpinned, the device's copies go, and the host's lose their prefix.
    let evicted: Vec<_> = tree.evict(GROUP, DEVICE, 10).unwrap();
    let of = |tier| evicted.iter().filter(|copy| copy.tier == tier).count();
    assert_eq!((of(DEVICE), of(HOST)), (2, 2));
    tree.check().unwrap();
}

#[test]
fn a_removed_copy_in_use_says_so() {
    let mut tree = tree(1, 0);
    let done = tree.insert(&name(), GROUP, &[1, 2, 3], DISK, &slots(0..3), 0).unwrap();
    tree.insert(&name(), GROUP, &[1, 2, 3], DEVICE, &slots(5..6), 0).unwrap();
    let pin = tree.pin(done.handle, DISK).unwrap();
    let removed = tree.remove(&name(), GROUP, &[1, 2, 3], DISK, 1..2).unwrap();
    assert_eq!(removed.len(), 2, "the corrupt page and the one that followed only it");
    assert!(removed.iter().all(|copy| copy.in_use && copy.tier == DISK));
    assert_eq!(tree.match_prefix(&name(), GROUP, &[1, 2, 3]).unwrap().pages, 1);
    tree.check().unwrap();
    tree.unpin(pin).unwrap();
    tree.check().unwrap();
}

#[test]
fn counts_outlive_eviction_and_ghosts_are_bounded() {
    let mut tree = tree(1, 8);
    for round in 1..=3u32 {
        tree.insert(&name(), GROUP, &[1, 2, 3], DEVICE, &slots(0..3), 0).unwrap();
        assert_eq!(tree.access_counts(&name(), &[1, 2, 3]), [round; 3]);
        tree.clear(GROUP, DEVICE).unwrap();
        assert_eq!(tree.match_prefix(&name(), GROUP, &[1, 2, 3]).unwrap().pages, 0);
    }
    for other in 10..200u32 {
        tree.insert(&name(), GROUP, &[other, other], DEVICE, &slots(0..2), 0).unwrap();
        tree.clear(GROUP, DEVICE).unwrap();
        assert!(tree.stats().ghost_pages <= 8);
        tree.check().unwrap();
    }
    assert_eq!(tree.access_counts(&name(), &[1, 2, 3]), []);
}

#[test]
fn a_chunked_prefill_stays_one_node_and_hands_over() {
    let mut tree = tree(2, 64);
    let tokens: Vec<Token> = (0..40).collect();
    let (owner, follower) = (RequestId(1), RequestId(2));
    let claim = tree.claim(&name(), &tokens, owner).unwrap();
    assert_eq!((claim.held, claim.own.len(), claim.handle.pages()), (0, 1, 20));
    assert_eq!(claim.own[0], 0..20);
    tree.start(owner);
    for chunk in 0..3u32 {
        let offered = slots(chunk * 4..chunk * 4 + 4);
        tree.insert(&name(), GROUP, &tokens, DEVICE, &offered, chunk * 4).unwrap();
        tree.check().unwrap();
    }
    assert_eq!(tree.stats().nodes, 1);
    let found = tree.match_prefix(&name(), GROUP, &tokens).unwrap();
    assert_eq!((found.pages, found.transient.len()), (12, 1));
    assert_eq!(
        (found.transient[0].pages.clone(), found.transient[0].state),
        (12..20, TransientState::InFlight)
    );
    let other = tree.watch(&name(), &tokens, follower).unwrap();
    assert_eq!((other.held, other.own.len(), other.foreign.len()), (12, 0, 1));
    assert_eq!(tree.release(owner, |followers| followers.first().copied()).unwrap(), 8);
    assert_eq!(tree.owned_pages(follower), 8);
    assert_eq!(tree.take_changed(), [follower]);
    assert_eq!(tree.release(follower, |_| None).unwrap(), 8);
    tree.check().unwrap();
    assert_eq!(tree.standing(follower, GROUP, 20).unwrap().unowned, 8);
    tree.unwatch(follower);
    tree.check().unwrap();
    assert_eq!(tree.access_counts(&name(), &tokens), [1; 12]);
    assert_eq!((tree.stats().transient_pages, tree.stats().ghost_pages), (0, 0));
}

#[test]
fn groups_hold_their_pages_apart() {
    let config = TreeConfig { page_size: 1, groups: 2, tiers: 2, ghost_pages: 0 };
    let mut tree = HiRadixTree::new(config).unwrap();
    let (one, two) = (GroupId(0), GroupId(1));
    tree.insert(&name(), one, &[1, 2, 3], DEVICE, &slots(0..3), 0).unwrap();
    tree.insert(&name(), two, &[1, 2], DEVICE, &slots(0..2), 0).unwrap();
    let pages = |tree: &HiRadixTree, group| tree.match_prefix(&name(), group, &[1, 2, 3]).unwrap().pages;
    assert_eq!((pages(&tree, one), pages(&tree, two)), (3, 2));
    let pin = tree.match_into(&name(), one, &[1, 2, 3], DEVICE, &mut Vec::new()).unwrap();
    assert!(tree.clear(two, DEVICE).unwrap().is_empty(), "a pin in a tier keeps all groups there");
    tree.check().unwrap();
    tree.unpin(pin).unwrap();
    assert_eq!(tree.clear(one, DEVICE).unwrap().len(), 3);
    tree.check().unwrap();
    assert_eq!((pages(&tree, one), pages(&tree, two)), (0, 2));
    let wrong = tree.evict(GroupId(2), DEVICE, 1);
    assert_eq!(wrong, Err(RadixError::UnknownPlace { group: GroupId(2), tier: DEVICE, groups: 2, tiers: 2 }));
}

#[test]
fn an_empty_tree_answers() {
    let mut tree = tree(16, 4);
    let mut table = Vec::new();
    let pin = tree.match_into(&name(), GROUP, &[1; 64], DEVICE, &mut table).unwrap();
    assert_eq!((pin.pages(), table.len()), (0, 0));
    tree.unpin(pin).unwrap();
    assert!(tree.evict(GROUP, DEVICE, 5).unwrap().is_empty());
    assert_eq!(tree.claim(&name(), &[1; 15], RequestId(1)).unwrap(), Default::default());
    assert_eq!(tree.release(RequestId(1), |_| None).unwrap(), 0);
    let short = tree.insert(&name(), GROUP, &[1; 31], DEVICE, &slots(0..2), 0);
    assert!(matches!(short, Err(RadixError::TooFewTokens { .. })));
    let config = TreeConfig { page_size: 0, groups: 1, tiers: 1, ghost_pages: 0 };
    assert!(matches!(HiRadixTree::new(config), Err(RadixError::Configuration { field: "page_size" })));
    assert_eq!(tree.stats().nodes, 0);
    tree.check().unwrap();
}

#[test]
fn pages_generated_one_by_one_end_up_in_one_node() {
    let mut tree = tree(2, 0);
    let tokens: Vec<Token> = (0..200).collect();
    let prompt = tree.insert(&name(), GROUP, &tokens[..20], DEVICE, &slots(0..10), 0).unwrap();
    let mut pin = tree.pin(prompt.handle, DEVICE).unwrap();
    for page in 10..100u32 {
        let new = &tokens[page as usize * 2..page as usize * 2 + 2];
        let done = tree.extend(pin.handle(), GROUP, new, DEVICE, &[PageId(page)]).unwrap();
        let longer = tree.pin(done.handle, DEVICE).unwrap();
        tree.unpin(std::mem::replace(&mut pin, longer)).unwrap();
        tree.check().unwrap();
        assert_eq!(tree.stats().nodes, 1);
    }
    tree.unpin(pin).unwrap();
    assert_eq!(tree.match_prefix(&name(), GROUP, &tokens).unwrap().prefix(DEVICE), slots(0..100));
}

#[test]
fn nodes_that_something_was_used_between_stay_apart() {
    let mut tree = tree(1, 0);
    let whole = tree.insert(&name(), GROUP, &[1, 2], HOST, &slots(0..2), 0).unwrap();
    let found = tree.match_prefix(&name(), GROUP, &[1]).unwrap();
    let held = tree.pin(found.handle, DISK).unwrap();
    // In the host's order: the leaf, then another sequence, then the first page again.
    tree.insert(&name(), GROUP, &[7], HOST, &[PageId(7)], 0).unwrap();
    tree.insert(&name(), GROUP, &[1], HOST, &[PageId(8)], 0).unwrap();
    tree.unpin(held).unwrap();
    tree.check().unwrap();
    assert_eq!(tree.page_path(whole.handle).unwrap(), [1, 2]);
    let order: Vec<u32> = (0..3).map(|_| tree.evict(GROUP, HOST, 1).unwrap()[0].slot.0).collect();
    assert_eq!(order, [1, 7, 0]);
}
