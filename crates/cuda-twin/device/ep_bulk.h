/*
 * ep_bulk.h: the twin's GPUs are older than the bulk copy engine.
 */
#ifndef EP_BULK_H
#define EP_BULK_H
#include "ep_near.h"
#endif
