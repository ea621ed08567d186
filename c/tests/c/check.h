/* A check that ends a test's function with 1, and says where. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>

#define CHECK(what)                                                        \
	do {                                                               \
		if (!(what)) {                                             \
			printf("%s:%d: %s\n", __FILE__, __LINE__, #what);  \
			return 1;                                          \
		}                                                          \
	} while (0)

#endif
