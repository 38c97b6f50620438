//! Situations of the queue, each told step by step: who follows whom, who inherits, who is told.
#![allow(missing_docs, clippy::unwrap_used)]

use strata_radix::{HiRadixTree, RadixError, Standing, TreeConfig};
use strata_types::{GroupId, Namespace, PageId, RequestId, TierId, Token};

const GROUP: GroupId = GroupId(0);
const DEVICE: TierId = TierId::DEVICE;
const HOST: TierId = TierId::HOST;
const DISK: TierId = TierId::DISK;

fn tree(ghost_pages: usize) -> HiRadixTree {
    HiRadixTree::new(TreeConfig { page_size: 1, groups: 1, tiers: 3, ghost_pages }).unwrap()
}

fn name() -> Namespace {
    Namespace::new("tenant", "")
}

fn slots(range: std::ops::Range<u32>) -> Vec<PageId> {
    range.map(PageId).collect()
}

fn watch(tree: &mut HiRadixTree, tokens: &[Token], request: u64) {
    tree.watch(&name(), tokens, RequestId(request)).unwrap();
}

fn standing(tree: &HiRadixTree, request: u64) -> Standing {
    tree.standing(RequestId(request), GROUP, u32::MAX).unwrap()
}

fn first(followers: &[RequestId]) -> Option<RequestId> {
    followers.iter().min().copied()
}

#[test]
fn a_standing_says_where_each_page_is() {
    let mut tree = tree(0);
    let path: Vec<Token> = (0..10).collect();
    tree.insert(&name(), GROUP, &path[..2], DEVICE, &slots(0..2), 0).unwrap();
    tree.insert(&name(), GROUP, &path[..5], HOST, &slots(0..4), 1).unwrap();
    tree.insert(&name(), GROUP, &path[..6], DISK, &slots(0..2), 4).unwrap();
    watch(&mut tree, &path[..8], 1);
    tree.start(RequestId(1));
    watch(&mut tree, &path, 2);
    tree.watch_only(&name(), &path, RequestId(3)).unwrap();
    let known = standing(&tree, 2);
    assert_eq!((known.device, known.host, known.disk), (2, 3, 1));
    assert_eq!((known.foreign, known.foreign_owner, known.own, known.unowned), (2, Some(RequestId(1)), 2, 0));
    assert!(known.foreign_in_flight && !known.foreign_queued);
    assert_eq!(known.loads.iter().map(|(_, pages)| pages).sum::<u32>(), 3);
    let third = standing(&tree, 3);
    assert_eq!((third.foreign, third.own), (4, 0));
    assert!(third.foreign_in_flight && third.foreign_queued);
    let short = tree.standing(RequestId(2), GROUP, 3).unwrap();
    assert_eq!((short.device, short.host, short.disk, short.foreign, short.own), (2, 1, 0, 0, 0));
    let nobody = tree.standing(RequestId(9), GROUP, 1).unwrap_err();
    assert_eq!(nobody, RadixError::Unwatched { request: RequestId(9) });
    assert_eq!(nobody.to_string(), "request 9 watches no path: watch one first");
    tree.check().unwrap();
}

#[test]
fn only_those_whose_path_changed_are_told_and_each_once() {
    let mut tree = tree(100);
    let (left, right): (Vec<Token>, Vec<Token>) = ((0..8).collect(), (100..108).collect());
    for (path, at) in [(&left, 0), (&right, 8)] {
        tree.insert(&name(), GROUP, path, DEVICE, &slots(at..at + 8), 0).unwrap();
    }
    for tail in 0..6u32 {
        let path = if tail % 2 == 0 { &left } else { &right };
        watch(&mut tree, &[path.as_slice(), &[200 + tail]].concat(), tail.into());
    }
    assert_eq!(tree.take_changed(), []);
    // The left document goes page by page, by the end of the order.
    for _ in 0..8 {
        assert_eq!(tree.evict(GROUP, DEVICE, 1).unwrap().len(), 1);
    }
    let mut told = tree.take_changed();
    told.sort_unstable();
    assert_eq!(told, [0, 2, 4].map(RequestId));
    assert_eq!(tree.take_changed(), []);
    tree.start(RequestId(3));
    assert_eq!(tree.take_changed(), [RequestId(3)]);
    tree.insert(&name(), GROUP, &[300, 301], DEVICE, &slots(90..92), 0).unwrap();
    tree.insert(&name(), GROUP, &right, HOST, &slots(0..8), 0).unwrap();
    tree.unwatch(RequestId(5));
    let mut told = tree.take_changed();
    told.sort_unstable();
    assert_eq!(told, [1, 3].map(RequestId));
    tree.check().unwrap();
}

#[test]
fn a_document_that_goes_page_by_page_tells_its_many_watchers_once() {
    let mut tree = tree(1000);
    let document: Vec<Token> = (0..250).collect();
    tree.insert(&name(), GROUP, &document, DEVICE, &slots(0..250), 0).unwrap();
    for request in 0..5000u64 {
        watch(&mut tree, &[document.as_slice(), &[1000 + request as Token]].concat(), request);
    }
    for _ in 0..250 {
        assert_eq!(tree.evict(GROUP, DEVICE, 1).unwrap().len(), 1);
    }
    assert_eq!(tree.take_changed().len(), 5000);
    assert_eq!(standing(&tree, 4711).unowned, 250);
    let again = tree.claim_again(RequestId(7)).unwrap();
    assert_eq!((again.held, again.own.len(), again.own[0].clone()), (0, 1, 0..251));
    assert_eq!(tree.take_changed().len(), 5000);
    assert_eq!(standing(&tree, 4711).foreign_owner, Some(RequestId(7)));
    tree.check().unwrap();
    // The heir is asked for once, not for each node.
    let mut asked = 0;
    let released = tree.release(RequestId(7), |followers| {
        asked += 1;
        assert_eq!(followers.len(), 4999);
        first(followers)
    });
    assert_eq!((released, asked), (Ok(251), 1));
    // Cut into many nodes under as many followers, which all decline: still once.
    for length in 1..250 {
        tree.watch_only(&name(), &document[..length], RequestId(10_000)).unwrap();
    }
    tree.unwatch(RequestId(10_000));
    assert!(tree.stats().nodes > 5200, "transient nodes are not joined again");
    let mut asked = 0;
    assert_eq!(tree.take_over(RequestId(7), true), Ok(250));
    let released = tree.release(RequestId(7), |_| {
        asked += 1;
        None
    });
    assert_eq!((released, asked), (Ok(250), 1));
    assert_eq!(standing(&tree, 1).unowned, 250);
    let again = tree.claim_again(RequestId(0)).unwrap();
    assert_eq!(again.own.first(), Some(&(0..251)));
    assert_eq!((standing(&tree, 0).own, standing(&tree, 1).foreign), (251, 250));
    tree.check().unwrap();
}

#[test]
fn each_part_of_a_run_goes_to_the_first_who_waits_for_it() {
    let mut tree = tree(0);
    watch(&mut tree, &[1, 2, 3, 4, 5, 6], 9);
    watch(&mut tree, &[1, 2, 3, 4, 7], 3);
    watch(&mut tree, &[1, 2, 8], 2);
    tree.watch_only(&name(), &[1, 2, 3, 4, 5], RequestId(5)).unwrap();
    let mut asked = Vec::new();
    let released = tree.release(RequestId(9), |followers| {
        let mut sorted: Vec<u64> = followers.iter().map(|follower| follower.0).collect();
        sorted.sort_unstable();
        asked.push(sorted);
        first(followers)
    });
    assert_eq!(released, Ok(6));
    // Pages 1 and 2 to request 2, pages 3 and 4 to request 3, page 5 to request 5, page 6 to nobody.
    assert_eq!(asked, [vec![2, 3, 5], vec![3, 5], vec![5]]);
    assert_eq!([2, 3, 5].map(|request| tree.owned_pages(RequestId(request))), [3, 3, 1]);
    assert_eq!(standing(&tree, 9).unowned, 1);
    tree.check().unwrap();
    tree.unwatch(RequestId(9));
    tree.check().unwrap();
    assert_eq!(tree.access_counts(&name(), &[1, 2, 3, 4, 5, 6]).len(), 5, "nobody needs page 6");
}

#[test]
fn who_has_waited_long_enough_takes_what_was_not_started() {
    let mut tree = tree(0);
    watch(&mut tree, &[1, 2], 1);
    tree.start(RequestId(1));
    watch(&mut tree, &[1, 2, 3, 4], 2);
    watch(&mut tree, &[1, 2, 3, 4, 5], 3);
    assert_eq!(tree.take_over(RequestId(3), false), Ok(2));
    assert_eq!((standing(&tree, 3).own, standing(&tree, 3).foreign), (3, 2));
    assert_eq!(tree.owned_pages(RequestId(2)), 0);
    assert_eq!(tree.take_over(RequestId(3), true), Ok(2));
    assert_eq!(standing(&tree, 3).own, 5);
    assert_eq!(tree.take_over(RequestId(3), true), Ok(0));
    let told = tree.take_changed();
    assert_eq!(told.len(), 3);
    tree.check().unwrap();
}

#[test]
fn watched_pages_outlive_every_bound_and_then_go() {
    let mut tree = tree(0);
    let path = [1, 2, 3, 4];
    tree.watch_only(&name(), &path, RequestId(1)).unwrap();
    tree.watch_only(&name(), &path[..2], RequestId(2)).unwrap();
    tree.watch_only(&name(), &[], RequestId(3)).unwrap();
    assert_eq!(standing(&tree, 3), Standing::default());
    for _ in 0..3 {
        tree.insert(&name(), GROUP, &path[..3], DEVICE, &slots(0..3), 0).unwrap();
        assert_eq!(tree.clear(GROUP, DEVICE).unwrap().len(), 3);
        tree.check().unwrap();
        assert_eq!(standing(&tree, 1).unowned, 4);
        assert_eq!(tree.stats().ghost_pages, 0, "what is watched takes no ghost's room");
    }
    assert_eq!(tree.access_counts(&name(), &path), [3, 3, 3, 0]);
    tree.unwatch(RequestId(1));
    tree.check().unwrap();
    assert_eq!(tree.access_counts(&name(), &path), [3, 3]);
    assert_eq!(tree.stats().watchers, 2);
    tree.unwatch(RequestId(2));
    tree.unwatch(RequestId(2));
    tree.unwatch(RequestId(3));
    tree.check().unwrap();
    assert_eq!((tree.stats().nodes, tree.stats().watchers), (0, 0));
}

#[test]
fn what_was_known_only_to_watchers_goes_with_the_last_of_them() {
    let mut tree = tree(100);
    tree.watch_only(&name(), &[1, 2, 3, 4], RequestId(1)).unwrap();
    watch(&mut tree, &[1, 2], 2);
    tree.insert(&name(), GROUP, &[1], DEVICE, &slots(0..1), 0).unwrap();
    tree.release(RequestId(2), |_| None).unwrap();
    tree.unwatch(RequestId(2));
    assert_eq!(tree.access_counts(&name(), &[1, 2, 3, 4]), [1, 0, 0, 0]);
    tree.unwatch(RequestId(1));
    assert_eq!(tree.access_counts(&name(), &[1, 2, 3, 4]), [1]);
    assert_eq!((tree.stats().nodes, tree.stats().ghost_pages), (1, 0));
    for tail in [3, 4] {
        tree.watch_only(&name(), &[7, 8, tail], RequestId(tail.into())).unwrap();
    }
    tree.unwatch(RequestId(3));
    assert_eq!(tree.stats().nodes, 3);
    tree.unwatch(RequestId(4));
    assert_eq!(
        (tree.stats().nodes, tree.stats().ghost_pages),
        (1, 0),
        "what led to the branches is gone too"
    );
    tree.check().unwrap();
}

#[test]
fn equal_histories_tell_in_equal_order() {
    let history = || {
        let mut tree = tree(10);
        for request in 0..200u64 {
            let tail = (request as Token).wrapping_mul(2_654_435_761) % 17;
            watch(&mut tree, &[1, tail, 2, request as Token], request);
        }
        let mut told = vec![tree.take_changed()];
        for owner in [0, 3, 60, 4] {
            tree.release(RequestId(owner), first).unwrap();
            tree.unwatch(RequestId(owner));
            told.push(tree.take_changed());
        }
        told
    };
    assert_eq!(history(), history());
}

#[test]
fn what_happened_to_a_node_is_told_after_it_was_joined_with_the_next() {
    for (tier, other) in [(DEVICE, HOST), (HOST, DISK)] {
        let mut tree = tree(0);
        let path: Vec<Token> = (0..10).collect();
        tree.insert(&name(), GROUP, &path, tier, &slots(0..10), 0).unwrap();
        watch(&mut tree, &path, 1);
        let before = standing(&tree, 1);
        assert_eq!(tree.take_changed(), []);
        tree.watch_only(&name(), &path[..5], RequestId(2)).unwrap();
        let split = standing(&tree, 1);
        let told = if split == before { vec![] } else { vec![RequestId(1)] };
        assert_eq!((tree.stats().nodes, tree.take_changed()), (2, told.clone()), "only loads know the nodes");
        tree.unwatch(RequestId(2));
        assert_eq!((tree.stats().nodes, tree.take_changed()), (1, told));
        tree.watch_only(&name(), &path[..5], RequestId(2)).unwrap();
        tree.take_changed();
        tree.insert(&name(), GROUP, &path[..5], other, &slots(0..5), 0).unwrap();
        tree.unwatch(RequestId(2));
        assert_eq!((tree.stats().nodes, tree.take_changed()), (1, vec![RequestId(1)]));
        tree.check().unwrap();
    }
}

#[test]
fn copies_that_join_a_run_are_told() {
    let mut tree = tree(0);
    let path: Vec<Token> = (0..6).collect();
    tree.insert(&name(), GROUP, &path, HOST, &slots(0..6), 0).unwrap();
    watch(&mut tree, &path, 1);
    for end in 1..=6u32 {
        tree.insert(&name(), GROUP, &path[..end as usize], DEVICE, &slots(end - 1..end), end - 1).unwrap();
        assert_eq!(tree.take_changed(), [RequestId(1)]);
        assert_eq!((standing(&tree, 1).device, standing(&tree, 1).host), (end, 6 - end));
        tree.check().unwrap();
    }
    tree.insert(&name(), GROUP, &path[..3], DEVICE, &slots(90..93), 0).unwrap();
    assert_eq!(tree.take_changed(), [], "the offered copies were there already");
}

#[test]
fn groups_have_their_own_hits() {
    let config = TreeConfig { page_size: 1, groups: 2, tiers: 1, ghost_pages: 0 };
    let mut tree = HiRadixTree::new(config).unwrap();
    tree.insert(&name(), GROUP, &[1, 2, 3], DEVICE, &slots(0..3), 0).unwrap();
    tree.insert(&name(), GroupId(1), &[1, 2], DEVICE, &slots(0..2), 0).unwrap();
    watch(&mut tree, &[1, 2, 3, 4], 1);
    let of = |group| tree.standing(RequestId(1), GroupId(group), 4).unwrap();
    assert_eq!((of(0).device, of(0).own, of(0).unowned), (3, 1, 0));
    assert_eq!((of(1).device, of(1).own, of(1).unowned), (2, 1, 0));
    assert!(matches!(
        tree.standing(RequestId(1), GroupId(2), 4),
        Err(RadixError::UnknownPlace { group: GroupId(2), .. })
    ));
}
