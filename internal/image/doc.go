// Package image keeps root file systems: OCI image layouts and docker-save
// archives, unpacked by digest.
//
//	DIR/sha256-HEX/rootfs/     the flattened file system
//	DIR/sha256-HEX/image.json  names, size, the image's PATH
//	DIR/.tmp-…                 a load or a removal under way; deleted when the store is opened
//
// An image appears at once, by rename, after every digest in it was checked:
// blobs against their names, layers against the configuration's diff ids. What
// is refused leaves nothing behind. The digest of an image from a layout is that
// of its manifest; a docker-save archive of the old form has no manifest, there
// it is the digest of the configuration, which Docker shows as the image id.
package image
