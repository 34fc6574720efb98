// Package transfer moves files over connections of the action RPC: the owner of
// the bytes pushes them in chunks ([Send], the action __file_chunk), names their
// key in some other message, and the peer reads them from its own [Store] and
// deletes them. The protocol and its numbers are those of the published SDK
// 0.5.5, 0.6.3 and 0.7.
//
// A file belongs to the context that its chunks came under. It is seen as a whole
// or not at all, is never overwritten, and to anybody else its key looks like one
// that does not exist. Whoever received it over a connection and did not delete
// it loses it with the connection ([Holder.Close]).
//
// On disk, below the store's directory:
//
//	<SHA-256 of the owner>/<key>            the file, published in one step that never overwrites
//	<SHA-256 of the owner>/.payload-*.tmp   a file that still comes
//	<SHA-256 of the owner>/.quarantine-*    a file on its way out
//	.transfer-owners/<SHA-256>.json         the owner's record: whose the file is, and which inode
//
// Every step is relative to a directory that is held open, takes one name, and
// follows no symbolic link; a file counts only while it is the inode of its
// record. Nothing is synced to the disk: a transfer does not outlive the process
// that received it, and what a dead one left is swept by the next [Open].
package transfer
